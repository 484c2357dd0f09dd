"""The reward of exact matches as a function for TRL's trainers."""


def right(completions, ground_truth, **kwargs):
    """1 for each episode whose last message ends with the right number after ####, else 0."""
    answers = [messages[-1]["content"].rpartition("####")[2].strip() for messages in completions]
    return [float(answer == str(truth)) for answer, truth in zip(answers, ground_truth, strict=True)]
