"""Documents: files of every format, and the texts and conversations in them."""
