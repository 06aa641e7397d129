"""What stands in for vLLM where there is no card: its server speaks the calls of TRL's client, which is TRL's own.

With this folder's parent in PYTHONPATH, `python -m vllm.entrypoints.cli.main serve MODEL ...` is the server. Its
completions follow from the prompt and their place among those of the prompt. STAND_IN says what it does wrong:
"dies:N" at the Nth call for completions, "dies:N once" not where there is a report of an earlier server.
STAND_IN_REPORT: a file that it writes about itself.
"""

__version__ = "0.31.0"


def completion_of(prompt_ids, place):
    """Token ids."""
    length = 3 + 2 * place + sum(prompt_ids) % 7
    return [20 + (7 * sum(prompt_ids) + 11 * place + 5 * k) % 900 for k in range(length)]


# Names that TRL imports for an engine in the process.
LLM = RequestOutput = SamplingParams = object
