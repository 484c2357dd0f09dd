"""A course whose boxes are commands that verify themselves: `hone learn`.

A box is a text (``boxes/<part>/<nn>_<name>.md``) and a check (a function in ``checks/<part>.py`` under the name of the box). The
check reads what the learner's commands left in the folder ``learn``: files, runs, numbers, and the answers to its quiz.
"""
