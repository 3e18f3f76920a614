"""Callbacks and plug-ins for frameworks: one file each, written with nothing but what ``transfuse`` exports."""
