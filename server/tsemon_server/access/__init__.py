"""Who may do what: tokens, what each route asks of them (`table`), the gate before all routes, and signing in."""
