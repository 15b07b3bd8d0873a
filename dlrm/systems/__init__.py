"""Systems that source documents name: recipes, and benchmark rows as data."""
