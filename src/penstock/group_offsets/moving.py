"""Having a group begin elsewhere: what `penstock offsets reset` and the dashboard do, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.group_offsets.group import Group, GroupState, require_no_members
from penstock.group_offsets.planning import Change, plan, refuse_coordinators, reset_wanted
from penstock.group_offsets.targets import AtTime, Edge, chosen, target, topic_choice


def looked_at(known: Group, topics: Sequence[str] | None, *, to_change: bool = False) -> GroupState:
    """Return what there is to tell of a group, in the topics that were chosen; raise where that is nothing."""
    choices = [topic_choice(text) for text in topics or ()]
    counts = known.topics(choice.topic for choice in choices)
    if to_change:
        known.require_rights_to_write(choice.topic for choice in choices)
    state = known.state(counts, chosen(choices, counts) if choices else None)
    if not state.positions and not state.members:
        raise PenstockError(
            f"group {state.group} has no members, and no offsets of topics that this user may see; correct its name, "
            "which is that of the App, or name a topic with --topic to see which permission is missing"
        )
    return state


def planned_reset(
    known: Group, to: str, topics: Sequence[str] | None, *, keep_done: bool
) -> tuple[GroupState, list[Change]]:
    """Return where a group stands, and the change that a reset makes; nothing is changed.

    Args:
        known: the group.
        to: where to, as `penstock offsets reset --to` takes it.
        topics: which topics and partitions, as `--topic` takes them; all that the group has offsets of, when left out.
        keep_done: whether what is done above the commit point stays done.

    Raises:
        ConfigurationError: `to` or a topic is none, or an offset lies outside of its log.
        PenstockError: as `Group` raises.
    """
    aim = target(to)
    state = looked_at(known, topics, to_change=True)
    there = [position for position in state.positions if position.log is not None]
    found = (
        known.find(aim, (position.part for position in there)) if aim is Edge.LATEST or isinstance(aim, AtTime) else {}
    )
    wanted = reset_wanted(aim, there, found, keep_done=keep_done)
    refuse_coordinators(state.group, [topic for topic, _ in wanted])
    return state, plan(state.group, state.positions, wanted)


def move(known: Group, state: GroupState, changes: Sequence[Change]) -> None:
    """Make a change; raises as `Group.write`, and `GroupHasMembersError` where the group has members."""
    require_no_members(state)
    known.write(changes)
