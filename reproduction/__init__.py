"""The paper's tables and figures computed again: experiments, stages, studies, pages. Imports
featcal, never the other way round."""
