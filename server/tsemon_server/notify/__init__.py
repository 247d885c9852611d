"""Tells people and other programs of alerts: who (`configuration`), what (`messages`), how (`channels`, `sending`), when
(`notifier`).
"""
