"""The engine for real devices: every node is a process of its own and has its own data, rows and world.

world.py       the tree, population and context of one node: its ancestors, itself and all below it
message.py     a message: safetensors with a small header, checked before it is decoded
contents.py    what calls, answers and evaluations carry, and the limits that follow from the job
rehearsal.py   a short run on made-up data, from which these limits follow
versions.py    the rows of a node in versions, so that it can go back to before a call that was not heard
node.py        a node that is called by its parent
parent.py      a node that calls its children; the engine of the server and of teams
transport.py   what the nodes need of a network, and a network in memory
"""
