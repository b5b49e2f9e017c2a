"""The two ways a command may refuse. Both print one sentence and write nothing further."""


class BadInput(Exception):
    """Exit code 2: what was expected, what came, and what to do, in one sentence."""


class BudgetRefused(Exception):
    """Exit code 3: the workload does not fit the budget, or a mechanism was never declared."""
