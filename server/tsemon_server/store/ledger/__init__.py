"""What needs transactions: runs and attempts, alerts, rules and what they remember, and whom to tell."""
