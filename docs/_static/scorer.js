// what the search puts first: chapters and guides before the glossary, and these before listings of modules
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    score - (page === "glossary" ? 60 : page.startsWith("src/") ? 30 : page === "changelog" ? 10 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
