"""Applications: what is built on the core and imported by nothing in it. A reader of the core may skip them."""
