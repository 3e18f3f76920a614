"""Transfuse inside other libraries: one module for each, which needs that library installed."""
