"""Metrics, traces and pictures of a run. All are observers: they are made from events and steps."""
