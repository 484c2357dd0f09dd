"""Schedule simulator: the run's rollouter, buffer, player and engine client on virtual time.

``clock``        event loop whose time jumps to the next timer, and which detects deadlocks
``engine``       engine without a model: the time of a decode step grows with the number of its requests
``workload``     episodes to play: lengths of turns, seconds of tools and of scores
``simulation``   one run: the learner takes a batch, updates, and publishes new weights
``measured``     schedule fitted to a recorded run
``forecast``     that run under other schedules

Admission, buffering, interruption and resumption are the code of a real run. Only the durations are simulated.
"""
