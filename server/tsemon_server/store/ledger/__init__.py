"""The data that needs transactions: runs and attempts, alerts, rules with their memory, notices."""
