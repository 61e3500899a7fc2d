"""Post-merging rivals of FeatCal: adapters behind a merged model that stays as it is."""
