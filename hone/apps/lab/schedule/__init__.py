"""Steps of a recorded run under other schedules, for ``hone plan --schedule``.

``simulation``   learner, engines and the run's own group buffer, from event to event
``measured``     schedule fitted to a recorded run
``forecast``     that run under other schedules
"""
