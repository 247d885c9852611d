"""The logic behind the routes. No HTTP here."""
