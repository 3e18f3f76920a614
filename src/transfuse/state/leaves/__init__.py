"""One codec for each kind of leaf."""
