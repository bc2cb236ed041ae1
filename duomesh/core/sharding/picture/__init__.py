"""A picture of one program on a mesh, as SVG.

`draw` makes boxes and wires of a program; `order`, `columns` and `place` find their places; `parts` and `labels` say
what they look like; `scene` writes them down.
"""

from duomesh.core.sharding.picture.draw import draw_program, scene_of_program

__all__ = ["draw_program", "scene_of_program"]
