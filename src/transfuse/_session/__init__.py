"""One transfer: the source's end, the receiver's end, and what the conversations of one receive share."""
