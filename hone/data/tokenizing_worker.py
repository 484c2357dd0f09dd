"""Process that tokenizes chats for hone/data/tokenizing.py, which starts it.

stdin     the tokenizer, then chunks of chats, pickled by the parent
stdout    for each chunk its tokens, or the HoneError of one of its chats
"""

from __future__ import annotations

import os
import pickle
import sys

from hone.data.tokenizing import tokenize_here
from hone.errors import HoneError


def main() -> None:
    """Answer until the parent closes stdin."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print does not mix with the answers
    tokenizer = pickle.load(sys.stdin.buffer)
    while True:
        try:
            chats = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = tokenize_here(tokenizer, chats)
        except HoneError as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
