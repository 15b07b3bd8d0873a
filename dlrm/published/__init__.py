"""What source documents publish: benchmark rows as data, and the command that runs them."""
