"""`ferryman verify`: does an engine answer the same when it reuses state?

A `ReuseWay` warms the engine up and asks; `WayProbe` asks the same cold and finds the odd answer;
`Wager` bets on the warm one; `Examination` chooses what to try next and ends with a report.
"""
