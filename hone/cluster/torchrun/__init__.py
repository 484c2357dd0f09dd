"""Runtime over ranks that a launcher has started: torchrun, or a scheduler that sets the same variables.

Every rank runs the program: it reads the data, computes its rows of each batch, and learns the results of the others
(:mod:`~hone.cluster.torchrun.runtime`). The first rank alone has the run's session: directory, trackers, requests to stop. What it
decides, the others do (:mod:`hone.trainers.launched_session`).
"""
