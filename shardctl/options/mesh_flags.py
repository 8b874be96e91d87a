"""Declares the flags that make a mesh: a degree for each axis, or the whole mesh in one text."""

from typing import Annotated

from shardctl.base.errors import UsageError
from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.tensors.mesh import AXES, EXPERT_AXES, Mesh


def _build_degree_option(text: str, brief: str = "", *aliases: str) -> CommandOption:
    return CommandOption(HelpPanel.MESH, text, brief=brief, metavar="N", least=1, aliases=aliases)


@settings_class
class MeshFlags:
    """The degrees that were given, one per axis, or the text of `--mesh`."""

    tp: Annotated[
        int | None,
        _build_degree_option("Number of tensor-parallel ranks.", "Tensor-parallel ranks", "--tensor-parallel-size"),
    ] = None
    pp: Annotated[int | None, _build_degree_option("Number of pipeline stages.", "Pipeline stages")] = None
    dp: Annotated[int | None, _build_degree_option("Number of data-parallel replicas.", "Data-parallel replicas")] = (
        None
    )
    fsdp: Annotated[
        int | None,
        _build_degree_option(
            "Number of ranks that share the first dim of each tensor.",
            "FSDP ranks, which shard each tensor's first dim",
        ),
    ] = None
    cp: Annotated[int | None, _build_degree_option("Number of context-parallel ranks.", "Context-parallel ranks")] = (
        None
    )
    ep: Annotated[
        int | None,
        _build_degree_option("Number of expert-parallel ranks; they are ranks of the stage.", "Expert-parallel ranks"),
    ] = None
    etp: Annotated[int | None, _build_degree_option("Number of tensor-parallel ranks within each expert.")] = None
    mesh: Annotated[
        str | None,
        CommandOption(
            HelpPanel.MESH,
            "The whole mesh, outermost axis first, such as pp=2,fsdp=2,tp=4.",
            brief="All axes, outermost first: pp=2,fsdp=2,tp=4",
            metavar="AXES",
        ),
    ] = None

    def make_value(self) -> Mesh | None:
        """Return the mesh that was asked for, if one was; raises UsageError for a text beside degrees."""
        degrees: dict[str, int | None] = {axis: getattr(self, axis) for axis in (*AXES, *EXPERT_AXES)}
        given = {axis: degree for axis, degree in degrees.items() if degree is not None}
        if self.mesh is None:
            return Mesh.of(**given) if given else None
        if given:
            raise UsageError(
                f"--mesh and --{next(iter(given))} are both given", hint="write every axis in --mesh, or leave it out"
            )
        return Mesh.parse(self.mesh)
