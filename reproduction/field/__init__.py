"""Methods that only the study `field` runs: SVC, ProDistill, SurgeryV2, IntervMerge and task arithmetic in the tangent space."""
