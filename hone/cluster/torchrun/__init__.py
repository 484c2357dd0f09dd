"""Runtime over ranks that a launcher has started: torchrun, or a scheduler that sets the same variables.

    rank 0      the program, and the first worker
      | ^       calls and answers, over one connection to each other rank
      v |
    rank 1 ..   workers: they build roles and answer calls until rank 0 ends

Rank 0 loads the data and divides rows as the driver of a Ray run does. It computes its share of a call in the calling thread.
"""
