"""A report in the forms that people and programs read: text, Markdown, CSV, Parquet, curves and a page."""
