"""A JSON object of a schema, with the right values: form and content are separate terms.

A schema alone is gamed by an empty or constant object that fits it. So the form earns 0.2, the share of right values the rest.
"""

import json

SCHEMA = {"name": str, "age": int}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """0.2 for an object with exactly the keys and types, and 0.8 times the share of its values that are right."""
    try:
        value = json.loads(solution_str)
    except ValueError:
        value = None
    truth = json.loads(ground_truth)
    given = value if isinstance(value, dict) else {}
    fits = given.keys() == SCHEMA.keys() and all(type(given[key]) is kind for key, kind in SCHEMA.items())
    right = sum(given[key] == truth[key] for key in SCHEMA) / len(SCHEMA) if fits else 0.0
    return {"score": 0.2 * fits * (right > 0) + 0.8 * right, "acc": float(right == 1), "format": float(fits)}
