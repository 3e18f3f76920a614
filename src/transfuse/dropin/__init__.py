"""Other libraries' transports under their own names and on their own wire, for upgrading one end at a time."""
