"""Pages of docs/ that are written from the code; `scripts/make_docs` writes them."""
