"""Programs nobody here wrote: models, losses and solvers of other packages, analysed from shapes."""
