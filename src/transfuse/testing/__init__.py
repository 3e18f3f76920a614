"""What anyone needs who tests a transport: the oracle that says whether a received state equals the one sent."""
