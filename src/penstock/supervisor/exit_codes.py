"""Exit codes of the commands, which the supervisor of member processes reads."""

#: Something failed; trying again may help.
EXIT_FAILED = 1
#: Wrong use: trying again does not help.
EXIT_USAGE = 2
#: No broker answered.
EXIT_CONNECTION = 3
