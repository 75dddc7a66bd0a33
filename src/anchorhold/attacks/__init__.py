"""What an attacker wants, and how he goes about it: goals by name (`ATTACKS`), a `Scene`, and `attack`."""

from .goal import Goal, ProtocolName, Scene
from .menu import ATTACKS, goal_named
from .run import BALL, PGD, Attacked, attack, fgsm

__all__ = ["ATTACKS", "BALL", "PGD", "Attacked", "Goal", "ProtocolName", "Scene", "attack", "fgsm", "goal_named"]
