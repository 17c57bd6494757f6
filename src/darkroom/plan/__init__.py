"""The plan: memory, time and money before anything runs.

`counting`, `training` and `generation` run the real code under fake tensors and lay straight lines through
what they count (`profile`); `roofline` and `scale` turn counts into seconds with few physical efficiencies;
`jobs` and `money` say what fits, how long and how much; `ask` is the door; `advise` searches the settings;
`published` proves it all on tables that others measured; `calibrate` measures this machine.
"""
