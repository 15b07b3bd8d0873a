"""The meaning of columns, without their values: fields, labels, and transforms of numbers."""
