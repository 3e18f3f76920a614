"""The messages between source and receiver, and the routes that bytes take."""
