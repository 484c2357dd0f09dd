"""Before a run: what it will do, what memory and time it will take, and where its parts should live."""
