"""Who there is, who takes part, whose draw is whose, who listens to whom."""
