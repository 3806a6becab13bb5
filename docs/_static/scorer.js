// how Sphinx weighs names of the API; pages are ranked by search.js
var Scorer = {objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0, title: 15, partialTitle: 7, term: 5, partialTerm: 2};
