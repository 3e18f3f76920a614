"""Hostile peers over a real process group: small scripts, each of which states what the honest end must do."""
