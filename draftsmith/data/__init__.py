"""From conversations to supervised token ids, and the draft vocabulary counted from them."""
