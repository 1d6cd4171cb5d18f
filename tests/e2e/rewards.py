"""Rewards that a random model can score differently on: the share of even bytes, also slowly, or sometimes raising."""

import time

_calls = 0


def evenness(prompt: str, response: str, answer: str) -> float:
    return sum(ord(character) % 2 == 0 for character in response) / max(len(response), 1)


def slow_evenness(prompt: str, response: str, answer: str) -> float:
    """For a run that must not end before a test has disturbed it, on any machine."""
    time.sleep(0.03)
    return evenness(prompt, response, answer)


def evenness_but_every_tenth(prompt: str, response: str, answer: str) -> float:
    global _calls
    _calls += 1
    if _calls % 10 == 0:
        raise ValueError(f"call {_calls}")
    return evenness(prompt, response, answer)
