"""Rules over recorded runs: what they would have said, or did say, of trainings that are long over.

The rules are those of the service, by the same code, and a recording gives them what the service would have been sent:
the alerts are the same, step for step.
"""
