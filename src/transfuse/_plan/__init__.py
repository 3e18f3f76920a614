"""Which bytes go where, and who holds them. Pure: nothing here touches a byte of a tensor."""
