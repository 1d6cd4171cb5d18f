"""A reward that a random model can score differently on: the share of even bytes."""


def evenness(prompt: str, response: str, answer: str) -> float:
    return sum(ord(character) % 2 == 0 for character in response) / max(len(response), 1)
