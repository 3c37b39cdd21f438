-- Shared by the transitions of one agent's mailbox; joined in front of each by scripts.py.
--
-- KEYS[1] is `kf:{mail.<incarnation>}`, a list of packed nominations (records.py), oldest first.

