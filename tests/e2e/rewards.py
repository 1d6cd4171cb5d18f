"""Rewards that a random model can score differently on: the share of even bytes, and one that sometimes raises."""

_calls = 0


def evenness(prompt: str, response: str, answer: str) -> float:
    return sum(ord(character) % 2 == 0 for character in response) / max(len(response), 1)


def evenness_but_every_tenth(prompt: str, response: str, answer: str) -> float:
    global _calls
    _calls += 1
    if _calls % 10 == 0:
        raise ValueError(f"call {_calls}")
    return evenness(prompt, response, answer)
