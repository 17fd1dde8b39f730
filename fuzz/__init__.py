"""Operations, lockstep, targets, traces, minimizer and the command line: the only place that knows both sides."""
