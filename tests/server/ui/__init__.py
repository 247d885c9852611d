"""The pages, as a browser shows them."""
